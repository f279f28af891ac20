"""Other projects' formats: their files into a run's samples, and a run's samples into their files."""
