"""Launch processes, gather small tensors and sum gradients over them.

This package wraps `torch.distributed` and imports no other package except `utils`.
"""
