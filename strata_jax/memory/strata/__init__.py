"""The planning rules of the C++ engine Strata: what its memory models price, choose and allocate, as pure functions."""
