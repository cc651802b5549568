"""The ways to run a job."""
