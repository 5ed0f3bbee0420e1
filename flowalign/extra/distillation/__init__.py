"""Distil a policy into a few-step sampler, with or without rewards (TDM and TDM-R1)."""
