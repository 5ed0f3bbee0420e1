"""Pure torch: the mathematics of the field as functions of tensors."""
