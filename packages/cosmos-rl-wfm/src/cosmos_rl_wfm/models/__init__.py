"""Networks, autoencoders and text encoders of diffusers behind one model."""
