"""Checkpoints to and from files of torch.save and safetensors, in bounded memory."""
