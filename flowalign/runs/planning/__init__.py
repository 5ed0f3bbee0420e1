"""Plan a run before any weight is read: its table rows, its memory, and the GPUs that it fits."""
