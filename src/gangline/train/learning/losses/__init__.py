"""Parts of the one loss: what a token loses by its ratio, the weight of a token, and divergences.

`gangline.train.learning.loss` puts them together. `arrays` has the inputs that they share. Start with `surrogates`.
"""
