"""SpikeRecorder: what there was when a spike came, kept in files."""
