"""Operations on arrays and `QuantizedTensor`s, usable without jaxspec. Each has a plain reference beside it."""
