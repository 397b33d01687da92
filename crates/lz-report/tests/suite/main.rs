//! Pages are read back with an XML parser, and compared with what they were made of.

mod content;
mod contests;
mod dom;
mod hostile;
mod samples;
