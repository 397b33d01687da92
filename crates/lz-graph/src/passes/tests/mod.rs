mod attention;
mod blocks;
mod build;
mod conv;
mod elementwise;
mod linear;
mod order;
mod random;
