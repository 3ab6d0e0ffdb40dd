"""stepscope: where did the time of a distributed training step go, who caused it, and what would fixing it give?"""

__version__ = "0.1.0"
