"""Copy a state to host memory, so that training may go on while the copy is saved."""
