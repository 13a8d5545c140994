"""The simulator: prices moves and pipeline stages with the calibrated profile of a card. Imports no JAX."""
