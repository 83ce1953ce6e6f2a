"""The experiments of the paper: data, models, training, figures. The library never imports it."""
