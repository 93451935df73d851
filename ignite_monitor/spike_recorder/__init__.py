"""SpikeRecorder: files with the batch, the losses and the RNG state of every spike."""
