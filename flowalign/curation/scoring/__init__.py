"""`flowalign score`: preference datasets and folders of media, scored at scale."""
