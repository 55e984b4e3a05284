"""Published architectures in plain torch, one family per file; `placewise.zoo.module` builds them."""
