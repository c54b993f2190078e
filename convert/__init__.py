"""The command `jaxspec-convert`: Hugging Face checkpoints to Orbax and back, byte for byte."""
