"""The native transport: stores over obstore, and ranged GETs that bypass it."""
