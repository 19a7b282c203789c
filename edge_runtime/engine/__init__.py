"""The engine: schedule, step, sample, emit."""
