"""The trainable side: collation of episodes and demonstrations, forward passes, parallel layouts."""
