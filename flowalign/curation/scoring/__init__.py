"""Score preference datasets and folders of images or videos at scale, for `flowalign score`."""
