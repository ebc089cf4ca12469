// nanobind's own code, compiled with the extension: a source outside of this folder cannot be named portably.
#include <nb_combined.cpp>
