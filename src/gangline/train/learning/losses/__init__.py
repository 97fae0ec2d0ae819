"""Parts of the loss: surrogates, token weights and divergences.

`gangline.train.learning.loss` combines them. `arrays` defines their shared inputs. Start with `surrogates`.
"""
