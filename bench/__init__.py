"""What replicad yields and costs, beside peers or physical limits measured in the same run: `python -m bench`."""
