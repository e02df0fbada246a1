"""From a schedule to tensors: pages, block tables, step metadata, the forward pass, sampling."""
