"""Events of saves and loads, and what listens to them: log line, progress bar, trace."""
