"""The pages: plain functions from loaded runs to Dash components; what they show was reckoned in `analysis`."""
