"""Contains the networks and file readers that reward models share."""
