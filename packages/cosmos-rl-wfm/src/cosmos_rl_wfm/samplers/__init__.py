"""Steps of a denoising sampler as Gaussians with log-probability."""
