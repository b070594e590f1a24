"""The native transport: stores over obstore, and ranged GETs of our own beside it."""
