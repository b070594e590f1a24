"""Events of saves and loads, and their listeners: the log line, the progress bar, the trace."""
