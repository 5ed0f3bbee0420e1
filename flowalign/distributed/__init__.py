"""Processes: launch them, gather small tensors and sum gradients over them.

This room wraps `torch.distributed` and knows no other room but `utils`.
"""
