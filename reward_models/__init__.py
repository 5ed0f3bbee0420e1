"""Reward models, one file each. Import the one you need: nothing is loaded from here."""
