"""Checkpoints to and from files of torch.save and safetensors, and copies, in bounded memory."""
