"""Operations by torch's functions on a GPU or another accelerator: what its backends share."""
