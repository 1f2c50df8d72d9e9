"""One replica of the model: how it is cut into stages and how a stage is built."""
