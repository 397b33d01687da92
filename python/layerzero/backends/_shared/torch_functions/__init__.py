"""Operations by torch's functions, on any device: what the backends of torch share."""
