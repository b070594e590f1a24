"""Where credentials come from, for each provider; nothing here prints one."""
