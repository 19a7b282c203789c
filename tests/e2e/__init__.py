"""Tests of whole journeys."""
