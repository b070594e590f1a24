<<<<<<< HEAD
"""Real frameworks, saving to a real server. A file is skipped without its framework."""
=======
"""Real frameworks, saving to a real server. A file whose framework is not installed is skipped."""
>>>>>>> 90c95390b8754914b6579185252d31fc237e3c82
