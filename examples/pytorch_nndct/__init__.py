"""The name under which scripts for vai_q_pytorch import its quantizer. See `apis`."""
