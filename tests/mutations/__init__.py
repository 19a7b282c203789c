"""Forty bugs that a person might write, each as a patch, and the tests that catch it: `make mutations`."""
