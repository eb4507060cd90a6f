"""Files of arrays: safetensors, npy, npz, HDF5 and Zarr, of which any box can be read."""
