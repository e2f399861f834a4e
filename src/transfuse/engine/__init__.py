"""The step loop: schedule, run, sample, update."""
