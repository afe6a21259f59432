"""What is drafted for a pass, and how much of it is worth reading: costs, calibration, standings."""
