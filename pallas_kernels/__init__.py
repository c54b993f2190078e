"""Operations on arrays and `QuantizedTensor`s, each with a plain reference; needs no jaxspec."""
