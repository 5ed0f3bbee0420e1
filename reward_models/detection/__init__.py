"""Contains rewards from detected objects, text and regions."""
