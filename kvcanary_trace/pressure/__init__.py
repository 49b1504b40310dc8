"""Pressure: what a canary's capacities are, how full they get, and which will break. Live and offline; numpy only."""
