"""Contains the reward models, one file each; import the one you need, nothing is loaded here."""
