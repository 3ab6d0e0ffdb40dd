"""The decoder-only transformer that is trained: real torch, no communication of its own."""
