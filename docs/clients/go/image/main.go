// A question about an image from the .proto alone. ./build.sh, then
//
//	./with_image ADDRESS FILE QUESTION
//
// main.go above shows how a broken stream resumes. The resume of a stream with images has Resume.Items of Started.Items; if
// it ends with FAILED_PRECONDITION, reason ITEMS_NEEDED, the next one has the images in Items, too.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "octavo-client-example/inference"
)

func run(address, path, question string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	connection, err := grpc.Dial(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	image := &pb.Item{Kind: &pb.Item_Image{Image: &pb.Image{Source: &pb.Image_Data{Data: data}}}}
	message := &pb.ChatMessage{Role: "user", Parts: []*pb.ContentPart{
		{Part: &pb.ContentPart_Item{Item: image}},
		{Part: &pb.ContentPart_Text{Text: question}},
	}}
	maxTokens, seed := uint32(100), uint64(5)
	stream, err := pb.NewInferenceClient(connection).Generate(context.Background(), &pb.GenerateRequest{
		Input:    &pb.GenerateRequest_Chat{Chat: &pb.ChatPrompt{Messages: []*pb.ChatMessage{message}}},
		Sampling: &pb.SamplingParams{MaxTokens: &maxTokens, Seed: &seed},
	})
	if err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Print(response.GetChunk().GetText())
	}
}

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: with_image ADDRESS FILE QUESTION")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
