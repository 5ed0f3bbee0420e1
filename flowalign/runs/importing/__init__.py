"""Convert configurations of other toolkits to run files."""
